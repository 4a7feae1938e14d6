"""Starts training commands in forked processes whose libraries are loaded already, so that a run takes its own seconds only.

Reads a line of JSON at a time from standard input and answers with a line. {"start": arguments, "log": path, "hook": text} gives
the number of a process that leads a group of its own; ``hook`` is Python text that runs in it before the command does.
{"wait": number} gives its exit code, or minus the signal that ended it.
"""

import json
import os
import signal
import sys

import matplotlib.figure  # noqa: F401
import monai.networks.nets  # noqa: F401

import segspeed.train
import segspeed.training
from data_prep import msd  # noqa: F401
from segspeed.cli import door
from segspeed.loader import torch_loader  # noqa: F401


def command(request):
    """In the child: the command as a shell would have started it."""
    os.setsid()
    for number, path in ((0, os.devnull), (1, request["log"]), (2, request["log"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.get("hook"):
        exec(request["hook"], {})
    sys.argv = ["train", *request["start"]]
    door(segspeed.train.main)()


def main():
    print("ready", flush=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        child = os.fork()
        if child == 0:
            command(request)
        print(child, flush=True)


if __name__ == "__main__":
    main()
