"""`python -m dspark`."""

from dspark.cli import main

if __name__ == "__main__":
    main()
