"""What each kind of record says in a report, a module each."""
