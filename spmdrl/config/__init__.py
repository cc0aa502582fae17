"""What a run is told: `schema` (dataclasses), `load` (files and flags), `checks` (all values together), `dump`."""
