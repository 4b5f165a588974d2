"""`python -m kvconvert`, and the installed script: Ctrl-C is provided for before the command line is imported."""

from kvconvert.io.interrupts import INTERRUPTED, exit_interrupted

try:
    import signal
except KeyboardInterrupt:
    exit_interrupted(INTERRUPTED - 128, None)


def main() -> None:
    """Entry point."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
        signal.signal(signal.SIGINT, exit_interrupted)
    from kvconvert.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
