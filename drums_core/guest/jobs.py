"""The HTTP part's side of the spawner: hands over jobs, and collects what they print."""

import contextlib
import dataclasses
import json
import os
import select
import socket
import time

# A stream's end is waited for this long after the process itself ended: what it left in the background may hold it.
_LINGER_S = 0.3
# The spawner kills in time; this is for a spawner that does not.
_GRACE_S = 15.0
_CHUNK = 1 << 16


class JobError(Exception):
    """The job could not be done; `kind` is absent, unsuitable or failed."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


class JobTimeout(JobError):
    """The job's process took too long, and was killed with its whole session."""

    def __init__(self, timeout_s):
        super().__init__("failed", f"timed out after {timeout_s:g} seconds")


@dataclasses.dataclass
class Result:
    """What a job printed, how it ended, and the descriptor that it handed over, if any."""

    returncode: int = 0
    output: bytearray = dataclasses.field(default_factory=bytearray)
    error: bytearray = dataclasses.field(default_factory=bytearray)
    output_truncated: bool = False
    error_truncated: bool = False
    descriptor: int | None = None
    name: str = ""


class Jobs:
    """Runs jobs; may be used by several threads at once.

    Args:
        channel: the spawner's socket.
        limit_bytes: of each stream, what is kept; the rest is read and thrown away.
    """

    def __init__(self, channel, limit_bytes=8 << 20):
        self._channel = channel
        self._limit = limit_bytes

    def run(self, op, *, timeout_s, data_fd=None, **parameters):
        """Runs one job and waits for its end.

        Raises:
            JobError: it could not be done.
            JobTimeout: it took too long.
        """
        with contextlib.ExitStack() as stack:
            job = os.memfd_create("job")
            stack.callback(os.close, job)
            os.write(job, json.dumps({"op": op, **parameters}).encode())
            os.lseek(job, 0, os.SEEK_SET)
            status, status_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(status)
            output, output_end = os.pipe()
            stack.callback(os.close, output)
            error, error_end = os.pipe()
            stack.callback(os.close, error)
            ends = [job, output_end, error_end, status_end.fileno()]
            if data_fd is not None:
                ends.append(data_fd)
            try:
                socket.send_fds(self._channel, [json.dumps({"timeout_s": timeout_s}).encode()], ends)
            finally:
                os.close(output_end)
                os.close(error_end)
                status_end.close()
            return self._collect(status, output, error, timeout_s)

    def _collect(self, status, output, error, timeout_s):
        result = Result()
        streams = {output: "output", error: "error"}
        failure = None
        ended = None
        deadline = time.monotonic() + timeout_s + _GRACE_S
        poller = select.poll()
        for descriptor in (status.fileno(), output, error):
            poller.register(descriptor, select.POLLIN)
        while ended is None or streams:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if ended is not None:
                    break
                _close(result.descriptor)
                raise JobError("failed", "the guest's spawner does not answer")
            for descriptor, _ in poller.poll(remaining * 1000):
                if descriptor in streams:
                    if not self._read(descriptor, result, streams[descriptor]):
                        poller.unregister(descriptor)
                        del streams[descriptor]
                    continue
                message, descriptors, _, _ = socket.recv_fds(status, 65536, 1, socket.MSG_CMSG_CLOEXEC)
                told = json.loads(message) if message else {"kind": "ended", "returncode": 127, "timed_out": False}
                if told["kind"] == "ended":
                    ended = told
                    poller.unregister(descriptor)
                    deadline = min(deadline, time.monotonic() + _LINGER_S)
                elif told["kind"] == "opened" and descriptors:
                    _close(result.descriptor)
                    result.descriptor, result.name = descriptors[0], told["name"]
                else:
                    failure = JobError(told["kind"], told["message"])
        if ended["timed_out"]:
            failure = JobTimeout(timeout_s)
        if failure is not None:
            _close(result.descriptor)
            raise failure
        result.returncode = ended["returncode"]
        return result

    def _read(self, descriptor, result, name):
        """Takes what a stream holds; false at its end."""
        data = os.read(descriptor, _CHUNK)
        kept = getattr(result, name)
        room = self._limit - len(kept)
        kept += data[:room]
        if len(data) > room:
            setattr(result, f"{name}_truncated", True)
        return bool(data)


def _close(descriptor):
    if descriptor is not None:
        os.close(descriptor)
