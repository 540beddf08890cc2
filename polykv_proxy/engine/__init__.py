"""Fetch, patch, build and supervise llama-server; nothing here knows pools or routes of the proxy.

paths       where the checkout, the per-user cache and the state lie
source      the pinned llama.cpp tree, checked by its hash
series      the patches on top of it: apply, check, export
tools       the compiler, CMake and Ninja of this machine, or what to install
compiling   run CMake and Ninja, count the steps, show the one that failed
build       one binary per (tree, patches, flags, compiler, processor) in the cache
model       the GGUF models of tests and demo
local       the command line of a local llama-server
supervisor  start processes in order, keep them running, stop them

Below them: ``files`` (locks, checksums, downloads), ``git``, and ``problem``, the one exception of this room.
"""
