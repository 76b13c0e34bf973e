//! Processes and files of any machine, for models.
//!
//! Owns two directions of the Model Context Protocol. [`McpServer`] offers commands and files of one
//! or several [`Environment`]s as tools, over standard input and output or over [`http`]. [`stdio`]
//! launches an MCP server of any make on an environment and carries its messages, as [`proxy`] does
//! for a client on this machine. Knows nothing of how an environment is reached, of settings and of
//! arguments.

mod environment;
pub mod http;
mod params;
mod patch;
pub mod proxy;
mod server;
pub mod stdio;
mod tools;

pub use environment::{Environment, EnvironmentError, Environments, OneEnvironment};
pub use server::{McpOptions, McpServer, TOOLS, serve_stdio};
