"""Models that train. `contract.py` says what a policy is; a backend only adds files here."""
