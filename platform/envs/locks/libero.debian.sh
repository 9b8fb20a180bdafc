# Off-screen OpenGL on Debian; run as root.
set -eu
apt-get update -q
apt-get install -q -y --no-install-recommends libegl1 libgl1 libgl1-mesa-dri libglib2.0-0
