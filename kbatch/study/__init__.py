"""Reading a search: its trials, what they decide, and its figures.

Imports point down this list, so that each file can be read with those above it alone:

- `trial`: one trial and its executions.
- `compare`: which trials are compared, and how texts name them.
- `decision`: the batch size to take.
- `trackers`: MLflow and Weights & Biases.
- `limits`: which limit binds, and what else changes what to do next.
- `page`: a decision in words and as a table.
- `study`: all of it, loaded from the files of a search.
- `figures`: drawn from a study. No result imports its figures (see `kbatch.page.result.FIGURES`).
"""
