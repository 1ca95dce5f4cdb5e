"""Durable state: named SQL statements on SQLite or PostgreSQL.

`base` is the interface, `queries.sql` has every statement, `rows` the typed rows. `sqlite` and `postgres` commit the
writes of many callers together, and return when they are durable. Start with `base`, then `threads`.
"""
