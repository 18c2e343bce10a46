"""The screen's recording: a program of the user's that films the display into a file, from one request to another.

Nothing of it is kept in the server: its process number is in a file of the user's, read and acted on as the user. So a
copy of a desktop goes on filming, and an agent that writes another number there ends only what it may end anyway.
"""

PATH = "/tmp/recording.mp4"
_NUMBER = "/run/user/1000/recording.pid"
_FRAMES_PER_S = 30

# Both print nothing; 3 is for what the caller did wrong.
_START = f"""
if [ -s {_NUMBER} ] && kill -0 "$(cat {_NUMBER})" 2>/dev/null; then exit 3; fi
command -v ffmpeg >/dev/null || {{ echo "ffmpeg is not installed" >&2; exit 4; }}
rm -f {PATH}
setsid ffmpeg -nostdin -loglevel error -y -f x11grab -draw_mouse 1 -video_size "$1" -framerate {_FRAMES_PER_S} \
    -i "$DISPLAY" -c:v libx264 -preset ultrafast -pix_fmt yuv420p {PATH} </dev/null >/dev/null 2>{_NUMBER}.log &
echo $! >{_NUMBER}
for i in $(seq 100); do
    [ ! -e {PATH} ] || exit 0
    kill -0 "$(cat {_NUMBER})" 2>/dev/null || break
    sleep 0.1
done
cat {_NUMBER}.log >&2
exit 4
"""
_END = f"""
number=$(cat {_NUMBER} 2>/dev/null) && kill -0 "$number" 2>/dev/null || exit 3
# What it is asked with, the file is closed properly after.
kill -INT "$number"
for i in $(seq 150); do
    kill -0 "$number" 2>/dev/null || {{ rm -f {_NUMBER} {_NUMBER}.log; exit 0; }}
    sleep 0.1
done
kill -KILL "$number"
echo "the recorder did not end" >&2
exit 4
"""
REFUSED = 3


def start_argv(width, height):
    """The command line that begins a recording; it ends with `REFUSED` when there is one already."""
    return ["/bin/sh", "-c", _START, "sh", f"{width}x{height}"]


def end_argv():
    """The command line that ends the recording; it ends with `REFUSED` when there is none."""
    return ["/bin/sh", "-c", _END]
