# shellcheck shell=bash
# What the shell scripts of this folder share. To be sourced, after `set -euo pipefail`.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck disable=SC2034  # read by the scripts that source this file
VENV="$ROOT/.venv"

# Without bytecode every process that is started spends most of its start on compiling.
unset PYTHONDONTWRITEBYTECODE

# Prints a message for the person at the terminal or the reader of a CI log.
say() { printf '%s\n' "$*" >&2; }

# Ends the script: what went wrong, and what to do about it.
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Prints the comment that opens a script: the text between its first line and the first line of code.
print_help() {
    awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$1"
}

# True if the class path in file $1 is newer than its pom $2, and has every file that it names.
is_fetched() {
    local file
    [[ -s "$1" && "$1" -nt "$2" ]] || return 1
    while IFS= read -r -d ':' file; do
        [[ -e "$file" ]] || return 1
    done < <(printf '%s:' "$(<"$1")")
}
