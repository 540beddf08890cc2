"""Other people's clients and tests against the proxy, beside the same against a stock llama-server: `make conformance`.

What passes in front of a stock llama-server has to pass through the proxy. Two things are asked:

upstream    llama.cpp's own server tests, those of the pinned commit, with the proxy in the place of the server binary
scenarios   the official openai and anthropic clients, as they are installed

An *arm* is what stands in the place of the server (``server``): a stock llama-server, the patched one with pools behind
the proxy, or a stock one behind the proxy. The models that the tests would download are a folder of stand-ins
(``hub``). What may fail, with its reason, is a list of names (``excuses``). Everything found is one page,
docs/conformance.md (``page``). No process outlives a run, however it ends (``children``).
"""
