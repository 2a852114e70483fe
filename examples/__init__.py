"""Programs that use the packages. They import one another by name, as scripts beside one another do."""
