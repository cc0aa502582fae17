"""Jobs that learn from given data: supervised fine-tuning.

run.py           runs the steps of one job
build.py         builds a job: rows, model, checkpoints, engine
rows.py          draws and encodes the rows of each step
encoder.py       turns a row into tokens with a loss mask
objective.py     the loss
generations.py   answers of the model during the job
preview.py       a look at the first rows, for a dry run
"""
