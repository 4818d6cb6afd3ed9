"""The tests, in folders that mirror `src/groupwise`; what several of them use is in `tests/support`."""
