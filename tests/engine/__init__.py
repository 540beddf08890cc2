"""Tests against a real llama-server: patched and stock, tiny random models and the tests' chat model."""
