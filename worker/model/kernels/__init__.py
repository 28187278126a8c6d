"""Attention kernels of a GPU: a file each, behind the protocol of ``base``, see ``choose``."""
