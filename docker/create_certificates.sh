#!/bin/sh
# Usage: create_certificates.sh FOLDER
#
# Makes the certificates of all that compose.yaml runs, below FOLDER/certs, by an authority whose key
# is in FOLDER/private. Existing files do not change.
set -eu
folder=$1

# make NAME KIND OPTION...: make NAME.pem by `streammeta certs KIND` unless it exists
make() {
    name=$1
    shift
    [ -e "$folder/certs/$name.pem" ] ||
        streammeta certs "$@" --dir "$folder/certs" --ca-key "$folder/private/ca.key"
}

make ca ca
for id in 1 2 3; do
    make "controller-$id" controller --id "$id" --cluster-id demo \
        --host "controller-$id" --host 127.0.0.1
done
make broker-1 broker --id 1 --cluster-id demo
for role in admin compactor reconciler; do
    make "$role-demo" user --role "$role" --name demo --cluster-id demo
done
