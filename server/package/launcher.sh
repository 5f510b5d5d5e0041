#!/bin/sh
# Starts the server's program, which finds its libraries in lib/. Symbolic links to this file work.
here=$(dirname -- "$(readlink -f -- "$0")")
for file in bin/steersman lib/mlx/lib; do
  if ! [ -e "$here/$file" ]; then
    echo "steersman: $here/$file is missing: unpack the whole archive, and link to the file steersman in it" >&2
    exit 1
  fi
done
exec "$here/bin/steersman" "$@"
