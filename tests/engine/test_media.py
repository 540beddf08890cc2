"""Images beside pools, with a projector that sees: nothing of an image is ever shared, and no answer changes by it.

The projector's weights are random like those of the models; what counts is that a picture's cells come from its pixels,
so that another picture gives another answer. Answers are compared with a stock server's after a full prefill.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

from .conftest import SMALL, Launcher
from .divergence import Distribution
from .hooks import Engine, Refused, Running
from .noise import Noise
from .pictures import CHAT, QUESTION, Json, chat, picture, seeing, text_of
from .tiny_models import IMAGE_N_TOKENS, write_tiny_projector

pytestmark = pytest.mark.engine

POOLS = ("--polykv-max-pools", "16")
CANARY = "The vault opens with marmalade."


@pytest.fixture(scope="module")
def system(noise: Noise) -> str:
    return noise.text(1, 200)


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    write_tiny_projector(path)
    return path


# The engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A patched server with a pool of the system message, and a stock one; both see."""

    engine: Engine
    stock: Engine
    pool: Json
    trunk: list[int]

    def right(self, body: Json) -> str:
        return text_of(self.stock.post(CHAT, body | {"cache_prompt": False}))

    def ask(self, body: Json, slot: int) -> Json:
        """Ask in this slot for the pool."""
        return self.engine.post(CHAT, body | {"id_slot": slot, "shared_pool_slot": self.pool["seq"]})

    def assert_shares(self, body: Json, slot: int) -> None:
        """A text chat shares the whole pool and gets its answer."""
        reply = self.ask(body, slot)
        assert reply["timings"]["pool_n"] == self.pool["n_tokens"]
        assert text_of(reply) == self.right(body)

    def read_by_another(self, noise: Noise) -> list[Distribution]:
        """What an agent in the last slot reads through the pool."""
        self.engine.erase(3)
        done = self.engine.ask(self.trunk + noise(3, 20), slot=3, pool=self.pool["seq"], forced=noise(4, 16))
        assert done.pool_n == self.pool["n_tokens"]
        return done.at

    def assert_cells_are_accounted_for(self) -> None:
        slots = self.engine.stats()["slots"]
        own = sum(slot["n_tokens"] - slot["n_pool_shared"] for slot in slots)
        assert self.engine.cells_used() == self.pool["n_tokens"] + own


def prefix_of(engine: Engine, system: str) -> list[int]:
    """What all chats with this system message start with."""
    one, two = (engine.render(CHAT, chat(system, question)) for question in ("Hi", "9 is a number"))
    return one[: next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)]


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def servers(request: pytest.FixtureRequest, launch_shared: Launcher, projector: Path) -> tuple[Engine, Engine]:
    sees = (*SMALL, "--mmproj", str(projector), "--no-cache-idle-slots")
    return launch_shared("patched", request.param, *sees, *POOLS), launch_shared("stock", request.param, *sees)


@pytest.fixture
def pair(servers: tuple[Engine, Engine], system: str) -> Iterator[Pair]:
    engine, stock = servers
    trunk = prefix_of(engine, system)
    yield Pair(engine, stock, engine.materialize(trunk), trunk)
    engine.free_all()
    for slot in range(4):
        engine.erase(slot)
    assert engine.cells_used() == 0


def test_pools_of_text_work_beside_a_projector(pair: Pair, noise: Noise) -> None:
    """Made, shared and taken from a slot, with the hash and the tokens that a server without eyes tells."""
    tokens = pair.trunk + noise(2, 30)
    assert pair.pool["tokens_hash"] == hash_of(pair.trunk)
    done = pair.engine.ask(tokens, 8, slot=0, pool=pair.pool["seq"])
    assert done.pool_n == len(pair.trunk)
    assert done.tokens == pair.stock.full(tokens, 8).tokens
    taken = pair.engine.snapshot(0, want_tokens=True)
    held = tokens + done.tokens[:-1]
    assert (taken["tokens"], taken["tokens_hash"]) == (held, hash_of(held))
    prompt = held + noise(5, 10)
    again = pair.engine.ask(prompt, 8, slot=1, pool=taken["seq"])
    assert again.pool_n == len(held)
    assert again.tokens == pair.stock.full(prompt, 8).tokens


def hash_of(tokens: list[int]) -> str:
    return xxhash.xxh64(np.array(tokens, "<i4").tobytes()).hexdigest()


def test_image_chat_gets_nothing_from_a_pool_and_its_own_answer(pair: Pair, system: str) -> None:
    answers = set()
    for slot, seed in enumerate((1, 2, 3)):
        body = chat(system, seeing(seed))
        reply = pair.ask(body, slot)
        assert (reply["timings"]["cache_n"], reply["timings"].get("pool_n", 0)) == (0, 0)
        assert pair.engine.slot(slot)["n_pool_shared"] == 0
        assert text_of(reply) == pair.right(body)
        answers.add(text_of(reply))
    assert len(answers) == 3, "pictures must matter"
    assert pair.engine.pool(pair.pool["seq"])["n_attach"] == 0
    pair.assert_cells_are_accounted_for()


def test_text_before_and_after_an_image_in_the_same_slot(pair: Pair, noise: Noise, system: str) -> None:
    """Slot 0 begins with text, slot 1 with the picture. The text of the media chat is gone with it."""
    before = pair.read_by_another(noise)
    plain, looking = chat(system, "Good day"), chat(system, seeing(1, CANARY))
    pair.assert_shares(plain, 0)
    for slot in (0, 1):
        assert text_of(pair.ask(looking, slot)) == pair.right(looking)
        pair.assert_cells_are_accounted_for()
        pair.assert_shares(plain, slot)
        pair.assert_cells_are_accounted_for()
    assert pair.read_by_another(noise) == before


def test_image_chat_that_follows_a_pooled_turn(pair: Pair, noise: Noise, system: str) -> None:
    """The slot goes on sharing the text in front of the picture, whose cells are its own."""
    before = pair.read_by_another(noise)
    first = chat(system, "Good day")
    pair.assert_shares(first, 0)
    answered = pair.right(first)
    second = chat(system, "Good day", answered, seeing(1))
    assert text_of(pair.ask(second, 0)) == pair.right(second)
    assert pair.engine.slot(0)["n_pool_shared"] == len(pair.trunk)
    pair.assert_cells_are_accounted_for()
    third = chat(system, "Good day", answered, seeing(1), pair.right(second), seeing(2))
    assert text_of(pair.ask(third, 0)) == pair.right(third)
    assert pair.read_by_another(noise) == before


def test_children_that_see(pair: Pair, system: str) -> None:
    body = chat(system, seeing(1))
    reply = pair.engine.post(CHAT, body | {"n": 2, "shared_pool_slot": pair.pool["seq"]})
    assert {choice["message"]["content"] for choice in reply["choices"]} == {pair.right(body)}
    assert [task["n_pool"] for task in pair.engine.stats()["finished"][-2:]] == [0, 0]


@pytest.mark.parametrize("n_tokens", [-1, 50], ids=["all", "text-in-front"])
def test_snapshot_of_a_slot_with_an_image_is_refused(pair: Pair, system: str, n_tokens: int) -> None:
    pair.ask(chat(system, seeing(1)), 0)
    before = pair.engine.pools()
    with pytest.raises(Refused) as refused:
        pair.engine.snapshot(0, n_tokens)
    assert refused.value.response.status_code == 501
    assert "holds media" in refused.value.response.json()["error"]["message"]
    assert pair.engine.pools() == before
    pair.ask(chat(system, "Good day"), 0)
    assert pair.engine.snapshot(0)["n_tokens"] > len(pair.trunk)


def test_pool_of_placeholders_is_refused(pair: Pair) -> None:
    """Inside the engine -1 stands for what a picture covers; as a token it means nothing."""
    with pytest.raises(Refused) as refused:
        pair.engine.materialize([*pair.trunk, *[-1] * IMAGE_N_TOKENS])
    assert refused.value.response.status_code == 400


def test_render_says_that_there_is_an_image_and_no_tokens(pair: Pair, system: str) -> None:
    told = pair.engine.post("/polykv/engine/render", {"path": CHAT, "body": chat(system, seeing(1))})
    assert told == {"tokens": [], "has_media": True, "n_prompts": 1}


def test_saved_image_restored_over_shared_cells(pair: Pair, noise: Noise, system: str) -> None:
    """The slot shares nothing then, can still not be snapshotted, and its picture is where it was."""
    before = pair.read_by_another(noise)
    looking = chat(system, seeing(1))
    pair.ask(looking, 0)
    saved = pair.engine.post("/slots/0?action=save", {"filename": "seen.bin"})
    pair.assert_shares(chat(system, "Good day"), 1)
    restored = pair.engine.post("/slots/1?action=restore", {"filename": "seen.bin"})
    assert restored["n_restored"] == saved["n_saved"]
    assert pair.engine.slot(1)["n_pool_shared"] == 0
    with pytest.raises(Refused, match="holds media"):
        pair.engine.snapshot(1)
    again = pair.ask(looking, 1)
    assert again["timings"].get("pool_n", 0) == 0
    assert text_of(again) == pair.right(looking)
    pair.assert_shares(chat(system, "Good day"), 1)
    assert pair.read_by_another(noise) == before


def test_shared_cells_never_move_under_an_image(launch: Launcher, projector: Path, noise: Noise, system: str) -> None:
    """An answer that reaches the end of the context ends there, and a piece dropped from the prompt moves nothing."""
    flags = (*SMALL, "--mmproj", str(projector), "--no-cache-idle-slots")
    shifting = ("--context-shift", "--cache-reuse", "16", "--kv-unified-per-slot", "640")
    engine, stock = launch("patched", "dense", *flags, *shifting, *POOLS), launch("stock", "dense", *flags)
    trunk = prefix_of(engine, system)
    pair = Pair(engine, stock, engine.materialize(trunk), trunk)
    before = pair.read_by_another(noise)
    pair.assert_shares(chat(system, "Good day"), 0)
    full = pair.ask(chat(system, seeing(1), max_tokens=2000), 0)
    assert full["choices"][0]["finish_reason"] == "length"
    assert 638 <= full["usage"]["total_tokens"] <= 640
    shorter = chat(" ".join(system.split()[:50] + system.split()[80:]), seeing(1))
    assert text_of(pair.ask(shorter, 0)) == pair.right(shorter)
    assert pair.read_by_another(noise) == before


def test_image_that_does_not_fit_is_refused_by_itself(launch: Launcher, projector: Path, noise: Noise) -> None:
    """A picture takes its cells at once: with too few of them, whoever sent it is told, as for a prompt of text."""
    engine = launch("patched", "dense", "-c", "512", *SMALL[2:], "--mmproj", str(projector), *POOLS)
    short = noise.text(5, 20)
    body = chat(short, seeing(1))
    n_before = len(prefix_of(engine, short)) + len(
        engine.http.post("/tokenize", json={"content": QUESTION}).json()["tokens"]
    )
    pool = engine.materialize(noise(6, 512 - n_before - IMAGE_N_TOKENS))
    reply = engine.http.post(CHAT, json=body)
    assert reply.status_code == 503
    assert "KV cache is full" in reply.json()["error"]["message"]
    assert engine.cells_used() == pool["n_tokens"]
    engine.free(pool["seq"])
    assert len(text_of(engine.post(CHAT, body))) > 0


def test_image_that_takes_the_last_cells_stops_one_at_most(launch: Launcher, projector: Path, noise: Noise) -> None:
    """Two answers, for which there are cells, are being written when a picture arrives that takes all the rest."""
    engine = launch("patched", "dense", "-c", "512", *SMALL[2:], "--mmproj", str(projector), *POOLS)
    system = noise.text(5, 60)
    looking = chat(system, seeing(1), max_tokens=4, id_slot=2)
    n_looking = len(prefix_of(engine, system)) + IMAGE_N_TOKENS + 12
    quiet = engine.full(noise(8, 40), 60, slot=0).body["content"]
    n_stopped = 0
    for n_left in range(2, 40, 2):
        long = noise(7, 512 - 40 - n_looking - n_left)
        with Running(engine, long, 40, id_slot=1) as longest, Running(engine, noise(8, 40), 60, id_slot=0) as other:
            reply = engine.http.post(CHAT, json=looking)
            ends = [longest.last_event(), other.last_event()]
        whole = [end.get("truncated") is False for end in ends] + [reply.status_code == 200]
        n_stopped += whole.count(False)
        assert whole.count(False) <= 1, (n_left, ends, reply.text)
        assert ends[1]["content"] == quiet or not whole[1]
        assert reply.status_code in (200, 503)
    assert n_stopped > 0, "the cells must have become scarce"


def test_a_prompt_that_ends_in_a_picture_is_refused_and_nobody_else_notices(pair: Pair, noise: Noise) -> None:
    """Nothing would be left to sample from: llama-server aborts when its turn comes, and takes everybody with it."""
    engine = pair.engine
    marker = engine.get("/props")["media_marker"]
    seen = {"multimodal_data": [picture(1).partition(",")[2]], "prompt_string": f"{QUESTION}{marker}"}
    with Running(engine, noise(40, 20), 200) as beside:
        for prompt in (seen, [seen, "and text"]):
            with pytest.raises(Refused) as refused:
                engine.post("/completion", {"prompt": prompt, "n_predict": 4})
            assert refused.value.response.status_code == 400
            assert "must not end in media" in refused.value.response.json()["error"]["message"]
        assert engine.post("/completion", {"prompt": seen | {"prompt_string": f"{marker}{QUESTION}"}, "n_predict": 4})
    assert beside.finished()["tokens_predicted"] == 200
