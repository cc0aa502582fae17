"""The job on paper: memory, bytes and times of every rank, computed before a GPU is asked for.

gpus.py  the GPUs that a plan knows, and files that describe others
"""
