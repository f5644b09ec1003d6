"""Read a search: its trials, the decision, and its figures.

A module imports only from modules above it in this list:

- `trial`: one trial and its training runs.
- `compared_trials`: the trials that are compared, and their names.
- `decision`: the batch size to take.
- `trackers`: MLflow and Weights & Biases.
- `limits`: the notes of a decision.
- `page`: a decision in words and as a table.
- `study`: the trials of a search, loaded from its files.
- `comparison`: several studies.
- `figures`: drawn from a study. No result imports its figures (see `kbatch.page.result.FIGURES`).
"""
