"""What every text shares: numbers, tables and sections."""
