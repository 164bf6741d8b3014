"""MetadataService.Watch: committed changes for many watchers."""
