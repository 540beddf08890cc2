"""What importing the package brings along, and what it says when something is missing."""

import subprocess
import sys
import textwrap


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_imported_before_it_is_used() -> None:
    loaded = run(
        """
        import sys
        import polykv_proxy.langgraph as polykv
        assert "ChatPolyKV" in dir(polykv)
        print([name for name in ("langchain_core", "langgraph", "openai", "langchain") if name in sys.modules])
        """
    )
    assert loaded.strip() == "[]"


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    said = run(
        """
        import sys
        sys.modules["langchain_openai"] = None
        try:
            from polykv_proxy.langgraph import ChatPolyKV
        except ImportError as error:
            print(error)
        """
    )
    assert said.startswith("ChatPolyKV needs langchain_openai")
    assert "in a clone of PolyKV, pip install -e '.[langgraph]'" in said
