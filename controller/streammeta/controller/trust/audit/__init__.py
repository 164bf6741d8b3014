"""The audit log: lines, files, rules, anchors and their verification."""
