"""``python -m polykv_proxy.cli`` is ``polykvctl``: how ``up`` starts ``serve`` with its own interpreter."""

from polykv_proxy.cli import main

if __name__ == "__main__":
    main()
