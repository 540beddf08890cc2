"""Fetch, patch, build and supervise llama-server; nothing here knows pools or HTTP routes of the proxy.

paths     where the checkout, the per-user cache and the state lie
source    the pinned llama.cpp tree, checked by its hash
series    the patches on top of it: apply, check, export
tools     the compiler, CMake and Ninja of this machine, or what to install
build     one binary per (base, patches, flags, compiler, machine) in the cache
model     the chat model of tests and demo
local     supervise one llama-server: start, wait until ready, restart with back-off, stop
"""
