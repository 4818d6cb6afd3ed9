"""Helpers that several tests share. A test module imports from here, never from another test module."""
