"""The steps of other libraries' neurons as cores, a module for each library."""
