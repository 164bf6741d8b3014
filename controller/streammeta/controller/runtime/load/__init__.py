"""Load of a controller: admission of calls, memory, descriptors."""
