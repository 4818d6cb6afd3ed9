"""Environments, agents and populations of them on one base."""
