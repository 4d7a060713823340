"""`python -m coalmine`."""

from coalmine.cli.main import main

if __name__ == "__main__":
    main()
