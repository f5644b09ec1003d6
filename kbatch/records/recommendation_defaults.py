"""What a recommendation takes where the user gives nothing; read before anything is imported."""

BASE_BATCH_SIZE = 32
BUDGET_S = 60.0
