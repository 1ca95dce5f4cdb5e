"""`python -m tinsmith` is the command line."""

from tinsmith.cli.main import main

if __name__ == "__main__":
    main()
