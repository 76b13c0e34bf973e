//! Client of a registry: how both sides of remote mode find each other and open streams.
//!
//! Calls the registry ([`Registry`], [`auth`], [`api`]), keeps long-term keys ([`identity`]) and the
//! trusted keys of environments ([`KnownEnvironments`]), and drives the relay over websockets
//! ([`relay`]). [`RegistryDial`] opens a link to an environment. The client and the service use this
//! crate; neither sessions nor methods occur in it.

mod calls;
mod dial;
mod error;
pub mod identity;
mod known;
pub mod relay;

pub use calls::{
    AgentIdentity, AgentIdentityError, ENVIRONMENT_OFFLINE, Proxies, Registry, RegistryError,
    RegistryOptions, RegistryUrl, RegistryUrlParseError, api, auth,
};
pub use dial::{KeyTrust, RegistryDial, RegistryDialOptions};
pub use error::{KnownEnvironmentsError, RegistryConnectError};
pub use known::KnownEnvironments;

pub use exec_server_relay::keys::{Fingerprint, PublicKey};
pub use exec_server_relay::noise::StaticKeys;
pub use exec_server_relay::registry::RegisterResponse;
pub use exec_server_relay::{EndReason, EndpointLimits, Mode, RelayExecutorConfig};
