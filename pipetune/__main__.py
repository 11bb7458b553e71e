"""`python -m pipetune`: the command where its script is not on the PATH."""

from pipetune.cli.main import main

if __name__ == "__main__":
    main()
