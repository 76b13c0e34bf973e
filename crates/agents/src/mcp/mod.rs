//! MCP server and MCP proxy: processes and files of any machine, for models.
//!
//! [`McpServer`] offers commands and files of one or several [`ToolEnvironment`]s as tools, over
//! standard input and output or over [`http`]. [`stdio`] starts any MCP server in an environment
//! and carries its messages; [`proxy`] does so for a client on this machine. This crate does not
//! connect to environments and does not read settings or arguments.

mod definitions;
mod environment;
pub mod http;
mod params;
mod patch;
pub mod proxy;
mod results;
mod server;
pub mod stdio;
mod tools;

pub use definitions::TOOLS;
pub use environment::{SingleEnvironment, ToolEnvironment, ToolEnvironmentError, ToolEnvironments};
pub use server::{McpOptions, McpServer, serve_stdio};
