"""`python -m multilora_cli` is `mlora`."""

from multilora_cli.cli.app import main

if __name__ == "__main__":
    main()
