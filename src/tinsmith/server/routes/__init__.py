"""What each endpoint does, one file per subject; `HANDLERS` of each are gathered in `server.app`."""
