"""Discrete-event simulation of a pool of workers around the live router: ``headwater simulate``."""
