# A Vulkan driver for Debian 12, whose own one is too old; run as root.
set -eu
if ! grep -rqs bookworm-backports /etc/apt/sources.list /etc/apt/sources.list.d; then
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' |
        head -n 1)
    echo "deb ${mirror:-http://deb.debian.org/debian} bookworm-backports main" \
        > /etc/apt/sources.list.d/bookworm-backports.list
fi
apt-get update -q
# The suffix names the suite for this package alone; nothing else is upgraded but libdrm.
apt-get install -q -y --no-install-recommends mesa-vulkan-drivers/bookworm-backports libgl1 libglib2.0-0
