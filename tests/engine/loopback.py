"""Single requests to servers of this machine. ``httpx.get`` reads everybody's certificates first: 20 ms of work each,
several times per test.
"""

import httpx

# No connection is kept: llama-server closes idle ones, and who runs next must not meet one half closed.
_http = httpx.Client(verify=False, trust_env=False, timeout=120, limits=httpx.Limits(max_keepalive_connections=0))

get = _http.get
post = _http.post
