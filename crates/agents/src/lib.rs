//! Commands and files of any machine for models.
//!
//! [`unified`] runs commands in sessions for a model. [`mcp`] (feature `mcp`) offers commands and
//! files of environments as tools of an MCP server, and runs MCP servers in environments. This crate
//! does not connect to environments and does not read settings or arguments.

#[cfg(feature = "mcp")]
pub mod mcp;
pub mod unified;
