#!/usr/bin/env bash
# Checks every locked package for public security advisories, by `pip-audit` over launch/locks/*.txt.
#
#   ./launch/audit.sh
#
# Exits with 1 if an advisory is found that launch/audit-allowed.txt does not list with a reason. Prints "skipped" and
# exits with 0 if the package index or the advisory service cannot be reached. pip-audit is installed into a separate
# environment in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

WAIT=20 # seconds for an answer
tool=.venv/.spmdrl/audit
say() { echo "[audit] $*"; }
skip() { say "skipped: $*"; exit 0; }

if [[ ! -x $tool/bin/pip-audit ]]; then
    rm -rf "$tool"
    .venv/bin/python -m venv "$tool"
    if ! timeout 120 "$tool/bin/python" -m pip install -qq --disable-pip-version-check --no-input --timeout "$WAIT" \
        --retries 0 pip-audit==2.10.1 >"$tool/install.log" 2>&1; then
        rm -rf "$tool"
        skip "pip-audit could not be installed from the package index"
    fi
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
audit() {
    timeout "${limit:-$WAIT}" "$tool/bin/pip-audit" --disable-pip --no-deps --progress-spinner off --timeout "$WAIT" \
        --cache-dir "$work/cache" "$@"
}

# The service works if it reports the known advisories of an old release.
echo "jinja2==2.10" >"$work/probe.txt"
if audit -r "$work/probe.txt" -f json >"$work/probe.json" 2>"$work/probe.log"; then
    skip "the advisory service reports nothing for a package with known advisories"
fi
grep -q '"id"' "$work/probe.json" 2>/dev/null || skip "the advisory service did not answer within $WAIT s"

# The first word of a line is the advisory; the other words are the reason why it is allowed.
ignored=()
while read -r id reason; do
    [[ -n $reason ]] || { say "launch/audit-allowed.txt: $id has no reason"; exit 1; }
    ignored+=(--ignore-vuln "$id")
done < <(grep -v '^ *\(#\|$\)' launch/audit-allowed.txt)

failed=0
for lock in launch/locks/*.txt; do
    # The suffix +cpu of torch's version is removed, because advisories name the plain version.
    sed -e 's/+cpu\b//' -e '/^ *#/d' -e '/^ *$/d' -e '/^-/d' -e 's/ *#.*//' "$lock" >"$work/lock.txt"
    rc=0
    limit=300 audit -r "$work/lock.txt" "${ignored[@]}" >"$work/found.txt" 2>&1 || rc=$?
    if ((rc == 0)); then
        say "$lock: $(wc -l <"$work/lock.txt") packages, no advisories"
    elif ((rc == 124)); then
        skip "the advisory service did not answer within 300 s for $lock"
    else
        say "$lock:"
        cat "$work/found.txt"
        failed=1
    fi
done
if ((failed)); then
    say "lock a version with the fix, or list the advisory with a reason in launch/audit-allowed.txt"
fi
exit $failed
