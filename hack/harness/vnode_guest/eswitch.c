/*
 * A kernel module that gives the virtual node's NICs an embedded switch, as far as devlink goes: igb has none, and no NIC
 * that has one is emulated. The kernel's devlink is real; like ice's driver it changes the mode only without VFs.
 *
 *   devlink dev eswitch show pci/<address>, … set pci/<address> mode legacy|switchdev
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <net/devlink.h>

#define MOST_NICS 8

struct eswitch {
	struct pci_dev *pci;
	u16 mode;
};

static struct devlink *found[MOST_NICS];

static int mode_get(struct devlink *devlink, u16 *mode)
{
	*mode = ((struct eswitch *)devlink_priv(devlink))->mode;
	return 0;
}

static int mode_set(struct devlink *devlink, u16 mode, struct netlink_ext_ack *extack)
{
	struct eswitch *eswitch = devlink_priv(devlink);

	if (mode == eswitch->mode)
		return 0;
	if (pci_num_vf(eswitch->pci)) {
		NL_SET_ERR_MSG_MOD(extack, "the mode is changed only while there are no VFs");
		return -EBUSY;
	}
	eswitch->mode = mode;
	return 0;
}

static const struct devlink_ops operations = { .eswitch_mode_get = mode_get, .eswitch_mode_set = mode_set };

static void undo(void)
{
	int i;

	for (i = 0; i < MOST_NICS && found[i]; i++) {
		struct pci_dev *pci = ((struct eswitch *)devlink_priv(found[i]))->pci;

		devlink_unregister(found[i]);
		devlink_free(found[i]);
		pci_dev_put(pci);
	}
}

static int __init start(void)
{
	struct pci_dev *pci = NULL;
	int count = 0;

	while (count < MOST_NICS && (pci = pci_get_device(PCI_VENDOR_ID_INTEL, 0x10c9, pci))) {
		struct devlink *devlink = devlink_alloc(&operations, sizeof(struct eswitch), &pci->dev);
		struct eswitch *eswitch;

		if (!devlink) {
			pci_dev_put(pci);
			undo();
			return -ENOMEM;
		}
		eswitch = devlink_priv(devlink);
		eswitch->pci = pci_dev_get(pci);
		eswitch->mode = DEVLINK_ESWITCH_MODE_LEGACY;
		devlink_register(devlink);
		found[count++] = devlink;
	}
	pci_dev_put(pci);
	return 0;
}

static void __exit stop(void)
{
	undo();
}

module_init(start);
module_exit(stop);
MODULE_DESCRIPTION("An embedded switch for the NICs of a virtual node, as devlink sees it");
MODULE_LICENSE("Dual MIT/GPL");
