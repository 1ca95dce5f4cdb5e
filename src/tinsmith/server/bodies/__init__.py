"""Request bodies that are read off the event loop, so that no body can hold it up.

`reader_pool` hands a large body to a reader process and gets back the few facts that the server needs (`read`);
`packed_shape` bounds a MessagePack body by its headers alone; `multipart` reads forms with files.
"""
