//! Options of `rendezvous` and `fleet`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Subcommand, ValueEnum};
use exec_server_rendezvous::TokenRole;

use super::serve::TlsArgs;
use crate::cli::values::FORMATS;
use crate::cli::values::{parse_duration, parse_time};

// Options of `rendezvous`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct RendezvousArgs {
    #[command(subcommand)]
    pub(in crate::cli) command: Option<RendezvousCommand>,

    /// Listen on `IP:PORT`, `http://IP:PORT` or `https://IP:PORT`; port 0 picks a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:4700")]
    pub(in crate::cli) listen: String,

    /// Store registrations, the signing secret and generated tokens in this directory
    ///
    /// [default: `rendezvous` in EXEC_SERVER_STATE_DIR, `$XDG_STATE_HOME/exec-server` or
    /// `~/.local/state/exec-server`]
    #[arg(long, value_name = "DIR", global = true)]
    pub(in crate::cli) state_dir: Option<PathBuf>,

    /// Read the tokens from this file [default: `tokens` in the state directory]
    #[arg(long, value_name = "FILE", global = true)]
    pub(in crate::cli) tokens: Option<PathBuf>,

    /// Announce this URL, as in `https://meet.example` [default: the one each caller used]
    #[arg(long, value_name = "URL")]
    pub(in crate::cli) public_url: Option<String>,

    /// Allow listening beyond loopback without TLS, behind a proxy that provides it
    #[arg(long, hide_short_help = true)]
    pub(in crate::cli) danger_no_tls: bool,

    /// Expire the address of an executor after this time; it registers again
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_duration,
        default_value = "1h",
        hide_short_help = true
    )]
    pub(in crate::cli) executor_url_lifetime: Duration,

    /// Expire the address and the authorization of a harness after this time
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_duration,
        default_value = "60s",
        hide_short_help = true
    )]
    pub(in crate::cli) harness_url_lifetime: Duration,

    /// Accept up to COUNT connections at a time
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "16384",
        hide_short_help = true
    )]
    pub(in crate::cli) max_connections: usize,

    /// Accept up to COUNT client connections per token and environment
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "4096",
        hide_short_help = true
    )]
    pub(in crate::cli) max_harness_sockets: usize,

    /// Serve Prometheus metrics at `http://IP:PORT/metrics`
    #[arg(long, value_name = "IP:PORT", hide_short_help = true)]
    pub(in crate::cli) metrics_listen: Option<String>,

    /// Report up to COUNT tenants by name in metrics; the others are counted as `other`
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "32",
        hide_short_help = true
    )]
    pub(in crate::cli) metrics_tenants: usize,

    /// Limit what tenants may use, by this file; reloaded when it changes
    ///
    /// One line each: `TENANT environments=N streams=N bandwidth=BYTES handshakes=N`; any of them
    /// may be left out. Bandwidth is in bytes per second, handshakes are per second; K, M and G may
    /// follow a number. `*` is every tenant without its own line.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) quotas: Option<PathBuf>,

    /// Limit what a tenant may use, as a line of --quotas; overrides the file
    ///
    /// Can be given several times.
    #[arg(long, value_name = "LINE", hide_short_help = true)]
    pub(in crate::cli) quota: Vec<String>,

    /// Count failed attempts through this reverse proxy by the address in X-Forwarded-For
    ///
    /// An address, or a network such as 10.0.0.0/8; can be given several times. The header is
    /// ignored if it comes from another address.
    #[arg(long, value_name = "ADDRESS", hide_short_help = true)]
    pub(in crate::cli) trusted_proxy: Vec<String>,

    /// Append registrations, connections and refusals to this file, as JSON lines
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) audit_file: Option<PathBuf>,

    /// Use COUNT threads for connections [default: one per core, one in all on up to 2 cores]
    #[arg(long, value_name = "COUNT", hide_short_help = true)]
    pub(in crate::cli) threads: Option<NonZeroUsize>,

    /// Write log lines in this format [default: text]
    #[arg(
        long,
        value_name = "FORMAT",
        value_parser = PossibleValuesParser::new(FORMATS),
        hide_short_help = true
    )]
    pub(in crate::cli) log_format: Option<String>,

    /// Log what matches, as in `info` or `exec_server_rendezvous=debug` [default: warn]
    #[arg(long, value_name = "FILTER")]
    pub(in crate::cli) log: Option<String>,

    #[command(flatten)]
    pub(in crate::cli) tls: TlsArgs,

    #[command(flatten)]
    pub(in crate::cli) oidc: OidcArgs,

    #[command(flatten)]
    pub(in crate::cli) nats: NatsArgs,
}

// Tokens of an OIDC issuer.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "OIDC")]
pub(in crate::cli) struct OidcArgs {
    /// Accept tokens (JWT) of this OIDC issuer, besides those of the token file
    #[arg(
        long,
        value_name = "URL",
        requires = "oidc_audience",
        requires = "oidc_jwks",
        hide_short_help = true
    )]
    pub(in crate::cli) oidc_issuer: Option<String>,

    /// Require this audience in the issuer's tokens
    #[arg(
        long,
        value_name = "AUDIENCE",
        requires = "oidc_issuer",
        hide_short_help = true
    )]
    pub(in crate::cli) oidc_audience: Option<String>,

    /// Read the issuer's keys from this JWKS document: a file or an `https://` URL
    ///
    /// RS256, ES256 and EdDSA. Read again when the file changes; from a URL every five minutes, and
    /// when a token names an unknown key, at most every ten seconds.
    #[arg(
        long,
        value_name = "FILE|URL",
        requires = "oidc_issuer",
        hide_short_help = true
    )]
    pub(in crate::cli) oidc_jwks: Option<String>,

    /// Trust these certificate authorities (PEM) for the keys' URL instead of the system's
    #[arg(
        long,
        value_name = "FILE",
        requires = "oidc_issuer",
        hide_short_help = true
    )]
    pub(in crate::cli) oidc_ca: Option<PathBuf>,

    /// Read the tenant from this claim; a token without it belongs to `default`
    #[arg(
        long,
        value_name = "CLAIM",
        default_value = "tenant",
        hide_short_help = true
    )]
    pub(in crate::cli) oidc_tenant_claim: String,

    /// Read the roles (executor, harness, admin) from this claim
    #[arg(
        long,
        value_name = "CLAIM",
        default_value = "roles",
        hide_short_help = true
    )]
    pub(in crate::cli) oidc_role_claim: String,

    /// Read the permitted environments from this claim; without it, all are
    #[arg(
        long,
        value_name = "CLAIM",
        default_value = "environments",
        hide_short_help = true
    )]
    pub(in crate::cli) oidc_environments_claim: String,
}

// Several rendezvous servers that act as one. The options exist in every build, so that one without
// the feature can report what is missing.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Fleet")]
pub(in crate::cli) struct NatsArgs {
    /// Join a fleet of rendezvous servers through these NATS servers with JetStream
    ///
    /// As in `nats://127.0.0.1:4222` or `tls://nats.example`, separated by commas. All nodes need
    /// the same token file. Registrations are stored in NATS, not in the state directory.
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        hide_short_help = true
    )]
    pub(in crate::cli) nats: Vec<String>,

    /// Authenticate with this NATS credentials file
    #[arg(long, value_name = "FILE", requires = "nats", hide_short_help = true)]
    pub(in crate::cli) nats_creds: Option<PathBuf>,

    /// Trust these certificate authorities (PEM) for NATS, besides the system's
    #[arg(long, value_name = "FILE", requires = "nats", hide_short_help = true)]
    pub(in crate::cli) nats_ca: Option<PathBuf>,

    /// Use this JetStream bucket; servers with the same bucket form one fleet
    #[arg(
        long,
        value_name = "NAME",
        default_value = "exec-server",
        requires = "nats",
        hide_short_help = true
    )]
    pub(in crate::cli) nats_bucket: String,

    /// Keep COUNT copies of the bucket, where NATS is itself a cluster
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "1",
        requires = "nats",
        hide_short_help = true
    )]
    pub(in crate::cli) nats_replicas: usize,

    /// Give this node a name, unique in its fleet [default: the host name and a random suffix]
    #[arg(long, value_name = "NAME", requires = "nats", hide_short_help = true)]
    pub(in crate::cli) node_name: Option<String>,

    /// Announce this URL of the node itself, for clients to use when other nodes fail
    ///
    /// [default: --public-url, else the address it listens on]
    #[arg(long, value_name = "URL", requires = "nats", hide_short_help = true)]
    pub(in crate::cli) node_url: Option<String>,

    /// Move connections to other nodes for up to this time after SIGTERM
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_duration,
        default_value = "5s",
        hide_short_help = true
    )]
    pub(in crate::cli) drain: Duration,

    /// Add this many seconds to this machine's clock, for tests
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "0",
        hide = true,
        allow_negative_numbers = true
    )]
    pub(in crate::cli) clock_offset: i64,
}

// Subcommands of `rendezvous`.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum RendezvousCommand {
    /// Create a token and add it to the token file; a running server accepts it within a second
    #[command(after_help = "Examples:
  exec-server rendezvous token-add build-7 --role executor \\
      --environment build-7 --out build-7.token
  exec-server rendezvous token-add ci --role harness --environment 'build-*'")]
    TokenAdd(TokenAddArgs),
}

// Options of `rendezvous token-add`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct TokenAddArgs {
    /// Give the token this name; the audit log shows it, and `fleet revoke` takes it
    pub(in crate::cli) name: String,

    /// Grant this role; can be given several times
    #[arg(long, value_enum, required = true)]
    pub(in crate::cli) role: Vec<RoleArg>,

    /// Limit it to this environment, or to those with a prefix, as in `build-*` [default: all]
    ///
    /// Can be given several times.
    #[arg(long, value_name = "ID")]
    pub(in crate::cli) environment: Vec<String>,

    /// Make it a token of this tenant; `*` is for admins of all tenants
    #[arg(long, value_name = "TENANT", default_value = "default")]
    pub(in crate::cli) tenant: String,

    /// Let it expire at this time, `2027-01-31T12:00:00Z`, or at the end of a day, `2027-01-31`, in UTC
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(in crate::cli) until: Option<String>,

    /// Write the token to this new file, mode 0600, instead of standard output
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) out: Option<PathBuf>,
}

// Options of `fleet`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct FleetArgs {
    #[command(subcommand)]
    pub(in crate::cli) command: FleetCommand,

    /// Print JSON
    #[arg(long, global = true)]
    pub(in crate::cli) json: bool,

    /// Connect to this rendezvous server, `https://HOST[:PORT]`; any node of a fleet will do
    ///
    /// [env: EXEC_SERVER_FLEET_URL] [default: http://127.0.0.1:4700]
    #[arg(
        long,
        global = true,
        value_name = "URL",
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(in crate::cli) url: Option<String>,

    /// Read the admin token from FILE [env: EXEC_SERVER_FLEET_TOKEN_FILE]
    ///
    /// [default: `rendezvous/admin.token` in EXEC_SERVER_STATE_DIR, `$XDG_STATE_HOME/exec-server` or
    /// `~/.local/state/exec-server`]
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(in crate::cli) admin_token_file: Option<PathBuf>,

    /// Trust the server with this key (`sha256//…`) [env: EXEC_SERVER_TLS_PIN]
    #[arg(
        long,
        global = true,
        value_name = "PIN",
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(in crate::cli) tls_pin: Option<String>,

    /// Trust these certificate authorities (PEM) instead of the system's [env: EXEC_SERVER_TLS_CA]
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(in crate::cli) tls_ca: Option<PathBuf>,

    /// Allow sending the token to another machine without TLS
    #[arg(
        long,
        global = true,
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(in crate::cli) danger_plain_http: bool,
}

// Subcommands of `fleet`.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(in crate::cli) enum FleetCommand {
    /// List the nodes of a fleet and what is connected to each
    Nodes,
    /// List environments and the node each is connected to, or remove some
    Environments {
        /// Show only this tenant
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,

        /// Remove this environment and close its connections; can be given several times
        #[arg(long, value_name = "ID")]
        remove: Vec<String>,
    },
    /// List the open streams and both ends of each
    Streams {
        /// Show only this environment
        #[arg(value_name = "ENVIRONMENT")]
        environment: Option<String>,

        /// Show only this tenant
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,
    },
    /// Revoke a token or key, or list revocations
    Revoke {
        /// Revoke `token:NAME`, `key:SHA256`, or the token of this name; without it, list all
        #[arg(value_name = "WHO")]
        who: Option<String>,

        /// Revoke it in this environment only [default: everywhere]
        #[arg(long, value_name = "ID", requires = "who")]
        environment: Option<String>,

        /// Name the tenant that the token or key belongs to
        #[arg(long, value_name = "TENANT", requires = "who")]
        tenant: Option<String>,

        /// Remove the revocation
        #[arg(long, requires = "who")]
        undo: bool,
    },
    /// Move all connections off a node and stop it
    Drain {
        /// Stop this node; `exec-server fleet nodes` lists the names
        #[arg(value_name = "NODE")]
        node: String,
    },
    /// Show the load of nodes, tenants and the busiest environments, refreshed regularly
    Top {
        /// Refresh after this time
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "2s")]
        interval: Duration,

        /// Stop after COUNT refreshes [default: until interrupted]
        #[arg(long, value_name = "COUNT")]
        count: Option<u64>,
    },
}

/// Roles by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum RoleArg {
    /// Register environments
    Executor,
    /// Connect to environments
    Harness,
    /// List, remove and revoke
    Admin,
}

impl RoleArg {
    pub(in crate::cli) fn role(self) -> TokenRole {
        match self {
            Self::Executor => TokenRole::Executor,
            Self::Harness => TokenRole::Harness,
            Self::Admin => TokenRole::Admin,
        }
    }
}
