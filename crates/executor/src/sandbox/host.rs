//! What this machine lets us enforce.
//!
//! Asked of the kernel by trying, in a process of its own, once.

use std::fs;

use serde::{Deserialize, Serialize};

/// What this machine lets us enforce.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The kernel's release.
    pub kernel: String,
    /// A user namespace with a mount namespace in it, or why not.
    pub user_namespaces: Result<(), String>,
    /// A mount namespace by privilege, or why not.
    pub privileged_mounts: Result<(), String>,
    /// Changing whole trees of mounts at once, or why not.
    pub mount_api: Result<(), String>,
    /// A network namespace, or why not.
    pub network_namespaces: Result<(), String>,
    /// A network namespace whose loopback interface works, or why not.
    pub private_networks: Result<(), String>,
    /// Whether a fresh `/proc` can be mounted.
    pub proc_mountable: bool,
    /// The version of Landlock; 0 if there is none.
    pub landlock: u32,
    /// Whether system calls can be filtered.
    pub seccomp: bool,
}

impl Host {
    /// Whether a view can be built from mounts: in a user namespace (true) or by privilege.
    ///
    /// # Errors
    ///
    /// Says what is in the way.
    pub fn mounts(&self) -> Result<bool, String> {
        self.mount_api.clone()?;
        let user = match (&self.user_namespaces, &self.privileged_mounts) {
            (Ok(()), _) => true,
            (Err(_), Ok(())) => false,
            (Err(why), Err(_)) => return Err(format!("user namespaces are not permitted: {why}")),
        };
        self.network_namespaces
            .clone()
            .map_err(|why| format!("network namespaces are not permitted: {why}"))?;
        Ok(user)
    }

    /// Whether a process can be given a network of its own, which it cannot leave.
    ///
    /// # Errors
    ///
    /// Says what is in the way.
    pub fn private_network(&self) -> Result<(), String> {
        self.mounts()?;
        self.private_networks
            .clone()
            .map_err(|why| format!("a network of its own cannot be set up: {why}"))?;
        if !self.seccomp {
            return Err("this kernel has no seccomp filters".to_owned());
        }
        Ok(())
    }

    /// Nothing at all, for this reason.
    pub fn nothing(why: &str) -> Self {
        let no = || Err(why.to_owned());
        Self {
            kernel: kernel_release(),
            user_namespaces: no(),
            privileged_mounts: no(),
            mount_api: no(),
            network_namespaces: no(),
            private_networks: no(),
            proc_mountable: false,
            landlock: 0,
            seccomp: false,
        }
    }
}

/// The kernel's release.
pub fn kernel_release() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.trim().to_owned()
}

/// Settings of a system that keep user namespaces from its users, each with the way out.
pub fn namespace_obstacles() -> Vec<(&'static str, &'static str)> {
    let setting = |path: &str| {
        let text = fs::read_to_string(path).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let mut found = Vec::new();
    if setting("/proc/sys/user/max_user_namespaces") == Some(0) {
        found.push((
            "user.max_user_namespaces is 0",
            "sysctl -w user.max_user_namespaces=15000",
        ));
    }
    if setting("/proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
        found.push((
            "kernel.unprivileged_userns_clone is 0",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ));
    }
    if setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
        found.push((
            "AppArmor restricts user namespaces (kernel.apparmor_restrict_unprivileged_userns is 1)",
            "give exec-server an AppArmor profile with `userns,`, or \
             sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ));
    }
    if found.is_empty() && in_container() {
        found.push((
            "this is a container, whose runtime may forbid them",
            "run it with a seccomp profile that allows unshare, clone and mount \
             (docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined)",
        ));
    }
    found
}

/// Whether this looks like a container.
pub fn in_container() -> bool {
    let marks = ["/.dockerenv", "/run/.containerenv"];
    let environ = fs::read("/proc/1/environ").unwrap_or_default();
    marks.iter().any(|mark| fs::exists(mark).unwrap_or(false))
        || environ
            .split(|&byte| byte == 0)
            .any(|variable| variable.starts_with(b"container="))
}
