"""What outlives a process: rows in SQLite or PostgreSQL."""
