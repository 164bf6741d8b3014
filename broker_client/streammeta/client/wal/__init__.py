"""Write-ahead logs: on a disk or in the bucket."""
