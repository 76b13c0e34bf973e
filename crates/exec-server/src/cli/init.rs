//! `exec-server init`: token, certificate, settings and service of a server for other machines.
//!
//! Creates files and replaces none. Starts nothing.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use exec_server_protocol::text::shell_quoted;
use exec_server_service::ListenUrl;
use exec_server_transport::Secret;
use exec_server_transport::private_file::make_directory;
use exec_server_transport::tls::TlsServer;

use super::access::{self, TlsFiles, write_new};
use super::args::InitArgs;
use super::{on, print, settings, token};

/// Where the service of the machine, as opposed to one of a user, is configured.
const SYSTEM_DIRECTORY: &str = "/etc/exec-server";
const SYSTEM_UNIT: &str = "/etc/systemd/system/exec-server.service";

/// The files that are made.
struct InitFiles {
    settings: PathBuf,
    token: PathBuf,
    cert: PathBuf,
    key: PathBuf,
    unit: PathBuf,
}

impl InitFiles {
    fn new(args: &InitArgs) -> anyhow::Result<Self> {
        let is_system = args.directory.is_none() && rustix::process::geteuid().is_root();
        let directory = match &args.directory {
            Some(directory) => std::path::absolute(directory)?,
            None if is_system => PathBuf::from(SYSTEM_DIRECTORY),
            None => on::configured()
                .own_file()
                .and_then(Path::parent)
                .map(|home| home.join("server"))
                .context("there is no home directory: pass --directory DIR")?,
        };
        let unit = match is_system {
            true => PathBuf::from(SYSTEM_UNIT),
            false if args.directory.is_some() => directory.join("exec-server.service"),
            false => settings::home_directory()
                .context("there is no home directory: pass --directory DIR")?
                .join(".config/systemd/user/exec-server.service"),
        };
        let file = |name: &str| directory.join(name);
        Ok(Self {
            // Beside the settings of the package, which it does not replace.
            settings: file("network.toml"),
            token: file("network.token"),
            cert: file("cert.pem"),
            key: file("key.pem"),
            unit,
        })
    }

    fn all(&self) -> [&Path; 5] {
        let Self {
            settings,
            token,
            cert,
            key,
            unit,
        } = self;
        [settings, token, cert, key, unit].map(PathBuf::as_path)
    }

    fn is_system(&self) -> bool {
        self.unit == Path::new(SYSTEM_UNIT)
    }
}

pub(super) fn run(args: &InitArgs) -> anyhow::Result<ExitCode> {
    let listen: ListenUrl = args.listen.parse()?;
    let ListenUrl::Tls(address) = listen else {
        bail!("--listen must be a wss:// URL, not `{listen}`: others reach this server");
    };
    if address.port() == 0 {
        bail!("--listen needs a port that stays the same, as in wss://0.0.0.0:4600");
    }
    let files = InitFiles::new(args)?;
    for path in files.all() {
        if rustix::fs::lstat(path).is_ok() {
            bail!(
                "`{}` exists; remove it, or pass --directory DIR",
                path.display()
            );
        }
        if let Some(parent) = path.parent() {
            make_directory(parent).with_context(|| format!("cannot use `{}`", parent.display()))?;
        }
    }
    let secret = token::random()?;
    write_new(&files.token, &format!("{}\n", secret.expose()), 0o600)?;
    let tls = access::make_identity(
        TlsFiles {
            cert: Some(files.cert.clone()),
            key: Some(files.key.clone()),
            client_ca: None,
            self_signed: true,
        },
        &[address],
    )?;
    write_new(
        &files.settings,
        &settings_text(args, &files, &secret),
        0o644,
    )?;
    let program = settings::program().context("cannot find the path of this program")?;
    write_new(&files.unit, &unit_text(&files, &program), 0o644)?;
    print(report(args, &files, &secret, &tls, address.port()).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// A path or a text as a string of TOML.
fn quoted(text: impl AsRef<Path>) -> String {
    toml::Value::String(text.as_ref().display().to_string()).to_string()
}

fn settings_text(args: &InitArgs, files: &InitFiles, secret: &Secret) -> String {
    let hash = token::hash(secret);
    let (cert, key) = (quoted(&files.cert), quoted(&files.key));
    format!(
        "# A server for other machines, made by `exec-server init`. It is reloaded when it changes;\n\
         # `exec-server config show --config FILE` lists all keys.\n\
         listen = [{listen}]\n\
         \n\
         [auth]\n\
         mode = \"capability-token\"\n\
         # One line for each client, NAME=SHA256:SCOPES,until=DATE. `exec-server token new` makes more.\n\
         token_sha256 = [\"init={hash}\"]\n\
         \n\
         [tls]\n\
         cert = {cert}\n\
         key = {key}\n",
        listen = quoted(&args.listen),
    )
}

fn unit_text(files: &InitFiles, program: &Path) -> String {
    // systemd interprets `%` and `$`.
    let escaped = |path: &Path| {
        let path = path.display().to_string();
        format!("\"{}\"", path.replace('%', "%%").replace('$', "$$"))
    };
    let target = match files.is_system() {
        true => "multi-user.target",
        false => "default.target",
    };
    format!(
        "# Made by `exec-server init`.\n\
         [Unit]\n\
         Description=Run commands on this machine for remote clients\n\
         \n\
         [Service]\n\
         # The main process is a guardian; its child, the server, sends the ready notification.\n\
         Type=notify\n\
         NotifyAccess=all\n\
         ExecStart={program} serve --config {settings}\n\
         ExecReload=/bin/kill -HUP $MAINPID\n\
         Restart=on-failure\n\
         TimeoutStopSec=90\n\
         KillMode=mixed\n\
         OOMPolicy=continue\n\
         \n\
         [Install]\n\
         WantedBy={target}\n",
        program = escaped(program),
        settings = escaped(&files.settings),
    )
}

fn report(
    args: &InitArgs,
    files: &InitFiles,
    secret: &Secret,
    tls: &TlsServer,
    port: u16,
) -> String {
    let node = rustix::system::uname();
    let node = node.nodename().to_string_lossy().into_owned();
    let host = args.host.clone().unwrap_or(node);
    let id: String = host
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '-' {
                c
            } else {
                '_'
            }
        })
        .collect();
    let made: String = files
        .all()
        .into_iter()
        .map(|path| format!("  {}\n", path.display()))
        .collect();
    let settings = shell_quoted(&files.settings.display().to_string());
    let by_hand = format!("exec-server serve --config {settings}");
    let start = match (files.is_system(), args.directory.is_some()) {
        (true, _) => "systemctl enable --now exec-server".to_owned(),
        (false, true) => by_hand.clone(),
        (false, false) => {
            "loginctl enable-linger; systemctl --user enable --now exec-server".to_owned()
        }
    };
    let warning = match files.is_system() {
        true => {
            "\nEvery client with the token can do everything as root here: add `User=` to the unit, and give\n\
                 that user the key.\n"
        }
        false => "",
    };
    format!(
        "Created:\n{made}\n\
         Start the server (without systemd: {by_hand}):\n  {start}\n{warning}\n\
         On the other machine (the line contains the token):\n  \
         (umask 077; echo {token} > {id}.token) && exec-server env add {id} wss://{host}:{port} \
         --tls-pin {pin} --token-file {id}.token\n",
        token = secret.expose(),
        pin = tls.pin(),
    )
}
