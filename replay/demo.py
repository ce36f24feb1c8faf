"""Placeholder."""

import argparse


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None: ...
